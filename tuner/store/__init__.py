"""The database: schema, engine, migrations, writer, reader. SQL stays in here."""
